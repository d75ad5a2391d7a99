"""Update rules, and what they are made of; `launch.optimizer` lists them by name."""
