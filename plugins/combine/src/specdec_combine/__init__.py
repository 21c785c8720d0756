"""Draft methods made of draft methods: the first that is sure, one behind the other, the one that pays."""
