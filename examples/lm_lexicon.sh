#!/usr/bin/env bash
# LM-Lexicon ("Definition Modeling with Mixture-of-Experts"), from rows to scores: split the training rows into domains,
# fine-tune an expert on each, merge them into one mixture, tune its gates, write definitions, score them.
#
#   pip install "lexperts[train,merge,cluster,definitions,offline,smollm2]"
#   DATA=wordnet bash examples/lm_lexicon.sh       # a folder with train.jsonl, validation.jsonl and test.jsonl
#
# A row is {"term": "...", "context": "...", "definition": "..."}; no term is in two of the files.
#
# Variables of the environment replace the values below. Started again after an interruption, the script continues with the step
# that was interrupted; training resumes from its last checkpoint. 20,000 rows take hours on two cores.
set -euo pipefail

DATA=${DATA:-wordnet}                    # the folder of the rows
MODEL=${MODEL:-smollm2}                  # any Llama: a folder or a Hub id
EMBEDDER=${EMBEDDER:-minilm}             # embeds the prompts, by which rows are split
OUT=${OUT:-runs/lm-lexicon}
EXPERTS=${EXPERTS:-4}
BEST_OF=${BEST_OF:-8}
STEPS=${STEPS:-200}                      # of tuning the gates
TRAINING=${TRAINING:---per-device-train-batch-size 16 --learning-rate 3e-4 --bf16 true --use-cpu true}

# 1. One cluster of training rows per expert: balanced k-means over the embedded prompts.
[ -d "$OUT/clusters" ] ||
  lexperts merge cluster "$DATA/train.jsonl" "$OUT/clusters" --clusters "$EXPERTS" --embedder "$EMBEDDER"

# 2. The experts. Only MLPs are trained: the mixture keeps each expert's, and averages nothing.
rows=(--validation-files "$DATA/validation.jsonl" --max-length 128)
for ((k = 0; k < EXPERTS; k++)); do
  lexperts train language --model-name-or-path "$MODEL" --train mlp --num-train-epochs 3 $TRAINING \
    --train-files "$OUT/clusters/$k.jsonl" "${rows[@]}" --output-dir "$OUT/experts/$k"
done

# 3. The mixture, with gates in closed form from the rows of each expert.
{
  echo "base_model: $MODEL"
  echo "format: lexicon"
  echo "average: base"
  echo "gate_mode: ridge"
  echo "experts_per_token: 2"
  echo "centroids: clusters/centroids.safetensors"
  echo "embedder: $EMBEDDER"
  echo "experts:"
  for ((k = 0; k < EXPERTS; k++)); do
    echo "  - {name: domain-$k, source_model: experts/$k, samples: clusters/$k.jsonl}"
  done
} > "$OUT/mixture.yml"
[ -d "$OUT/mixture" ] || lexperts merge compose "$OUT/mixture.yml" "$OUT/mixture"

# 4. The gates are tuned on the rows of all experts.
[ -d "$OUT/tuned" ] || {
  domains=()
  for ((k = 0; k < EXPERTS; k++)); do domains+=(--domain "domain-$k=$OUT/clusters/$k.jsonl"); done
  lexperts merge tune "$OUT/mixture" "$OUT/tuned" "${domains[@]}" --steps "$STEPS"
}

# 5. Definitions of the test rows: greedy, and the most likely of several samples.
options=(--model "$OUT/tuned" --keep term --keep context --max-new-tokens 32)  # without the definitions of the rows
lexperts define terms "$DATA/test.jsonl" "$OUT/greedy.jsonl" "${options[@]}"
lexperts define terms "$DATA/test.jsonl" "$OUT/best.jsonl" "${options[@]}" --best-of "$BEST_OF"

# 6. Scores, with intervals and a paired test.
lexperts evaluate definitions "$OUT/greedy.jsonl" "$OUT/best.jsonl" --references "$DATA/test.jsonl" --baseline greedy
