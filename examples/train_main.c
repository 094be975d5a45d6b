/* Defines the main function of the trainings. Each program has one kind of task. */
#include "examples/train_run.h"

int main(int argc, char **argv) { return train_main(&train_kind, argc, argv); }
