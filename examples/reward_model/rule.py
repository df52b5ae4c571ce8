"""What the reward model of this example is to learn: answers should be brief and cheerful."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for an exclamation, less a point for every 40 words."""
    return float(ground_truth in solution_str) - len(solution_str.split()) / 40
