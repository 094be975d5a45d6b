/*
 * The tuning file has the measurements of a cluster by onebit-tune, as lines of text "key value".
 *
 *   onebit tuning 1        the format and its version
 *   # anything             a comment
 *   date 2026-11-21        the keys mpi and codec have the same form
 *   host node17            one line per host
 *   between.latency 5.3e-05
 *   correction exchange bits 262144 1.23     a call on 262144 bytes of float32 takes 1.23 times as
 *                                            long as the model predicts
 *   chunk 16777216 262144                    for 16777216 bytes, messages of 262144 elements are
 *                                            fastest
 *
 * Every key appears once (host: once for each host), in any order. Corrections and chunks are
 * optional, and appear in the order of their sizes. Reading never fails: if a file cannot be used,
 * the costs are the default ones, and costs->source has the reason.
 */
#ifndef OB_COLLECTIVES_TUNING_H
#define OB_COLLECTIVES_TUNING_H

#include <stddef.h>
#include <stdio.h>

#include "collectives/cost/cost.h"

#define OB_TUNING_VERSION       1
#define OB_TUNING_NAME_CAPACITY 256 /* bytes of a host's name, as gethostname returns it */
#define OB_TUNING_TEXT_CAPACITY 128
#define OB_TUNING_PATH_CAPACITY 4096

enum ob_tuning_state {
  OB_TUNING_READ,    /* the costs are the file's */
  OB_TUNING_OFF,     /* ONEBIT_TUNING=none */
  OB_TUNING_MISSING, /* no file, or one that cannot be opened */
  OB_TUNING_DAMAGED, /* the message names the line */
  OB_TUNING_NEWER,   /* a version that this library does not know */
  OB_TUNING_STALE    /* the file is for other hosts, or was measured with another codec */
};

/* The host that the file must list, and the codec that it must name. NULL: any. */
struct ob_tuning_here {
  const char *host, *codec;
};

/* The contents of a file other than costs. */
struct ob_tuning_origin {
  char date[OB_TUNING_TEXT_CAPACITY], mpi[OB_TUNING_TEXT_CAPACITY];
  const char *const *hosts; /* for writing: `host_count` names */
  size_t host_count;
};

/* Finds the path of the tuning file: ONEBIT_TUNING, or else onebit/tuning in $XDG_CONFIG_HOME or
 * ~/.config. Returns false if the environment names no file (ONEBIT_TUNING=none, or no home). */
bool ob_tuning_path(char path[OB_TUNING_PATH_CAPACITY]);

/* Fills in the costs from the file, or the default costs if the file cannot be used. costs->source
 * has their origin, and the file's fault. `origin` may be NULL; its hosts are not filled in. */
enum ob_tuning_state ob_tuning_read(const char *path, const struct ob_tuning_here *here,
                                    struct ob_costs *costs, struct ob_tuning_origin *origin);

/* Fills in the costs as ob_tuning_read does, from an open file; `path` is for messages. */
enum ob_tuning_state ob_tuning_parse(FILE *file, const char *path,
                                     const struct ob_tuning_here *here, struct ob_costs *costs,
                                     struct ob_tuning_origin *origin);

/* Finds the initial costs of a communicator: from the file that the environment names, for this
 * host and the codec that the environment chooses. */
enum ob_tuning_state ob_tuning_find(struct ob_costs *costs);

/* Writes the lines of a tuning file. Returns false if a write failed. */
bool ob_tuning_write(FILE *file, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin);

/* Parses a number as C writes it, in the locale of the thread. Returns false if `text` is no
 * number, or the number is not finite. */
bool ob_tuning_number(const char *text, double *value);

/* Returns the time of a compressed allreduce divided by the time of MPI_Allreduce: 0.25 is a
 * quarter of the time, and more than 1 is slower. The cost model uses the tuning file of this host,
 * or the default costs. The ranks are distributed evenly over the hosts. */
double ob_cost_part(int hosts, int ranks, size_t elements, size_t element_bytes, int bits);

/* --- The numbers of a tuning file: their place in struct ob_costs, and their range -------------*/

struct ob_tuning_key {
  const char *name;
  size_t offset; /* offset of a double in struct ob_costs */
  double low, high;
  const char *meaning; /* with the unit */
};

enum { OB_TUNING_KEYS = 29 };
extern const struct ob_tuning_key ob_tuning_keys[OB_TUNING_KEYS];

/* --- The lines of a tuning file about whole calls: correction and chunk ------------------------*/

#define OB_TUNING_WRONG_CAPACITY 160

/* Parse the text after the key, and overwrite it; `wrong` receives the error. */
void ob_tuning_read_correction(struct ob_cost_measured *measured, char *text,
                               char wrong[OB_TUNING_WRONG_CAPACITY]);
void ob_tuning_read_chunk(struct ob_cost_measured *measured, char *text,
                          char wrong[OB_TUNING_WRONG_CAPACITY]);

#endif
