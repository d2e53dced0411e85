"""Speed and size, measured in whole processes against a peer or a baseline in the same run."""
