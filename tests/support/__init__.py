"""What tests share: strategies and checkpoints to convert, ways to start runs, faults, hosts and clusters."""
