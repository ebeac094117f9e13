"""Support for other libraries, one file for each; import the file to use it."""
