"""One layer: choices of ranges and codes from the sums over its inputs."""
