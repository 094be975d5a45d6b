/*
 * The command line of train_text.
 */
#ifndef EXAMPLES_TRAIN_OPTIONS_H
#define EXAMPLES_TRAIN_OPTIONS_H

#include <stddef.h>

enum { ADAM = 0, ONEBIT_ADAM = 1, DENSE_MPI = 2 }; /* --optimizer */
enum { ON_HOST = 0, ON_CUDA = 1 };                 /* --device */
enum { STAGED = 0, OVER_NCCL = 1 };                /* --transport */
enum { MOST_PATHS = 64, OPTION_WORDS = 512 };
#define FREEZE_DEFAULT ((size_t)-1) /* --freeze not given */

typedef struct train_options {
  const char *data[MOST_PATHS];
  size_t ndata;
  int optimizer;
  int compare;
  size_t steps;
  size_t seed;
  float learning_rate;
  size_t batch;  /* sequences of a rank in a step */
  size_t freeze; /* warm-up steps, or ONEBIT_FREEZE_AUTOMATIC */
  float beta2;
  float weight_decay;
  int scale;         /* an onebit_scale_t */
  size_t block_size; /* as in onebit_adam_options_t, and so is the next */
  size_t bucket_size;
  int no_error_feedback;
  size_t layers, width, heads, context;
  size_t report_every;   /* steps */
  size_t validate_every; /* steps; 0: only at the end */
  const char *log;       /* a file; NULL: none */
  size_t sample;         /* bytes of text to generate at the end */
  size_t ranks;          /* threads of this process; 0: MPI's processes */
  int device, transport;
  int products; /* a transformer_products_t */
  int help;
} train_options_t;

/* Fills in the options. Returns 0, or -1 with words that name the option at fault and its value. */
int train_options_parse(train_options_t *options, int argc, char **argv, char words[OPTION_WORDS]);

void train_options_print_help(void);

#endif
