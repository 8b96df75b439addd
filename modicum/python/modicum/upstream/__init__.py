"""What is known of other packages: the only place that touches their private names."""
