"""Parts of stage reconcile: compares the store with the listing, and finds what is missing, stray or to be stopped."""
