"""Schedule rules: every decision between tile IR and code, one file each, written as annotations."""
