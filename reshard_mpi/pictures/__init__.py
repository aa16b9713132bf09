"""Pictures of a plan: who feeds whom, and how both sides cut a tensor. Figures are computed once and drawn in any form."""
