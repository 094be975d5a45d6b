/*
 * train_text: data-parallel training of a character-level transformer, with any optimizer of the
 * library or its dense form.
 *
 *   mpirun -n 4 train_text --data /usr/share/common-licenses --compare
 *
 * Each rank draws its own sequences and computes its own gradients; onebit_optimizer_step exchanges
 * them and updates the parameters, which stay equal on all ranks to the last bit. The dense form is
 * the same optimizer, never frozen. The same seed gives the same run.
 */
#include "examples/train_run.h"

int main(int argc, char **argv) { return train_main(&text_kind, argc, argv); }
