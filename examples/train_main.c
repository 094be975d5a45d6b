/* Defines the main function of all training programs. Each program defines one train_kind. */
#include "examples/train_run.h"

int main(int argc, char **argv) { return train_main(&train_kind, argc, argv); }
