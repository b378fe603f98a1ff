"""What users can choose, checked when it is made."""
