"""Rounds that the device leads: the tree, the walk and the noise as tensor operations of fixed shapes."""
