#!/usr/bin/env bash
# Downloading the weights is not automated yet: this script fetches nothing and says where the commands are.
echo "download_weights.sh downloads nothing yet. The commands, folder by folder, are in checkpoints-download.md." >&2
exit 1
