"""Programs, a module for each family. Each module here is imported by itself."""
