"""What only the artifact needs: tables of runs, claims graded by them, the report, and published logs."""
