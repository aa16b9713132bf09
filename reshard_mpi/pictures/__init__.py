"""Draw a plan: who feeds whom, and how both sides cut a tensor. All forms draw the same figures."""
