"""How fast it is computed: one operator, several backends that all return the reference's bits."""
