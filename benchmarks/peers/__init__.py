"""Those who are measured: this project, and whom it is measured against."""
