"""Short ports of programs that others wrote, a module for each family."""
