"""The ground floor: distributed values, and the names of devices."""
