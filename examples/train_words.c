/*
 * train_words: data-parallel training of tables of word embeddings, on the next word of a text,
 * with any optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_words --data /usr/share/common-licenses --compare
 *
 * Nearly all parameters are in two tables of a row a word, and most words are rare: many elements
 * have a gradient of zero in most steps. Each rank draws its own places of the text;
 * onebit_optimizer_step exchanges and updates. The same seed gives the same run.
 */
#include "examples/train_run.h"

int main(int argc, char **argv) { return train_main(&word_kind, argc, argv); }
