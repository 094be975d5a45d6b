/*
 * train_images: data-parallel training of a small convolutional network on images, with any
 * optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_images --compare
 *   mpirun -n 4 train_images --images t10k-images-idx3-ubyte --labels t10k-labels-idx1-ubyte
 *
 * Without files it draws digits. The images are shuffled, always in the same way, and a fifth of
 * them is held out. Each rank computes the gradient of its part of each batch;
 * onebit_optimizer_step exchanges and updates. The same seed gives the same run.
 */
#include "examples/train_run.h"

int main(int argc, char **argv) { return train_main(&image_kind, argc, argv); }
