"""The weights of products: copies in other formats, gathered copies, and gradients that follow later."""
