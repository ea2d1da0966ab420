"""mhckit inside other libraries. Each needs that library; importing mhckit imports none of them."""
