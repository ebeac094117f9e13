"""From graphs of torch.fx: the rewriting of what graphs do not have, and the conversion of each node."""
