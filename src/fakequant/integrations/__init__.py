"""Support for other libraries, one file each; import the file to use it."""
