"""nova-orthon made to write weights itself, as an optimizer does that sets `one_pass`: the old text and the new."""

ONE_PASS = (
    """    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        \"""Update every piece's master once.\"""
""",
    """    one_pass = True

    @torch.no_grad()
    def step(self, scalars):
        self.update(scalars)
        for piece in self.pieces:
            if piece.weight is not None:
                piece.weight.copy_(torch.where(scalars.skip > 0, piece.weight, piece.master.bfloat16()))

    @torch.no_grad()
    def update(self, scalars):
""",
)
