"""What the kernels in Gluon for Hopper share."""
