"""What one run is: the request, what it comes to, dividing the work, transforming, verifying, what it has to say."""
