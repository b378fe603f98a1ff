"""What this project is tested with, for programs that want to test the same."""
