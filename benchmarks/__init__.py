"""How fast conversions are, beside what they are measured against."""
