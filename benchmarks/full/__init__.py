"""Train at the paper's scale: all images of CIFAR-10 and HAM10000, and bank for 200 epochs; one command each.

FEDVEIL_DATA=folder python -m benchmarks.full NAME ... [--folder runs/full] [--threads 1]
"""
