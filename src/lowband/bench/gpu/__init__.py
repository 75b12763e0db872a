"""`lowband gpu`: every row that needs a GPU, by one command, in as many calls as its minutes take."""
