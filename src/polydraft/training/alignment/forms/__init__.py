"""What some forms of drafts are made by: corrections of low rank, fewer heads and channels, several drafts at once."""
