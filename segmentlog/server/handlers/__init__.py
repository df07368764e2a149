"""What is done for each request, a file for each family of them: a function of a call and a decoded request."""
