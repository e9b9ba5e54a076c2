"""What children that are drawn from q would be worth, against the likeliest ones and one draw from p."""
