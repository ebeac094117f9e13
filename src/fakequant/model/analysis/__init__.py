"""What a prepared model computes, what each layer costs, what stays in float."""
