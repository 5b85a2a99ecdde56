"""Op definitions by family; importing this package registers all of them."""
