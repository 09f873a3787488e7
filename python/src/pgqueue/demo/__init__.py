"""The demos: flight records go through a queue. One consumer is killed on the way, and the results are verified."""
