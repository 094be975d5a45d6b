/*
 * Writes the inputs that the fuzzers start from: `seeds DIRECTORY` fills DIRECTORY/NAME/ for each
 * fuzzer. The library itself writes the inputs in its own formats. Rules are texts as users write
 * them.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/cost/tuning.h"
#include "compression/blocks.h"
#include "compression/sparse.h"
#include "optimizers/checkpoint/directory.h"
#include "tests/fuzz/fuzz.h"

static const char *root;

static FILE *open_seed(const char *fuzzer, const char *format, ...) {
  char path[4096], name[64];
  va_list arguments;
  snprintf(path, sizeof path, "%s/%s", root, fuzzer);
  if (mkdir(path, 0777) != 0 && errno != EEXIST)
    perror(path);
  va_start(arguments, format);
  vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  snprintf(path, sizeof path, "%s/%s/%s", root, fuzzer, name);
  FILE *file = fopen(path, "wb");
  FUZZ_CHECK(file);
  return file;
}

/* --- Messages: one of each shape, as message.c expects them. */

static void write_message(int shape, unsigned width) {
  const uint8_t choices[7] = {1, 31, (uint8_t)shape, 0, 5, 0, 0};
  size_t count = 1 * 37 + 31;
  struct ob_layout layout;
  FUZZ_CHECK(ob_layout_create(&layout, 32u << (shape & 3), 1, &count, NULL) == ONEBIT_OK);
  size_t first = layout.blocks / 2;
  struct ob_message_shape of = {.first = first,
                                .blocks = layout.blocks - first,
                                .words = layout.words - ob_layout_word(&layout, first),
                                .width = width,
                                .one_scale = shape & 4,
                                .dense = shape & 8,
                                .half = (shape & 24) == 24};
  struct ob_message_call call = {OB_MESSAGE_WORKER, choices[4], count, 0};
  unsigned char *message = fuzz_copy(NULL, 0, ob_message_bytes(&of));
  struct ob_view view = ob_message_view(message, &of);
  *view.header = ob_header_make(&of, &call, (uint16_t)ob_payload_flags(of.dense, of.half, of.width),
                                of.one_scale ? 0.5f : 0);
  for (size_t i = 0; i < ob_message_scales(&of); i++)
    view.scales[i] = 0.25f;
  ob_message_seal(message, &of, &ob_codec_scalar);
  FILE *file = open_seed("message", "shape-%d", shape);
  fwrite(choices, 1, sizeof choices, file);
  fwrite(message, 1, ob_message_bytes(&of), file);
  fclose(file);
  free(message);
  ob_layout_destroy(&layout);
}

/* --- A sparse message: one whole chunk and one short chunk */

static void write_sparse(void) {
  enum { count = 111 * 37 + 31 };
  static float values[count];
  const uint8_t choices[3] = {111, 31, 0};
  uint32_t message[2 * OB_SPARSE_STRIDE];
  for (int i = 0; i < count; i++)
    values[i] = (float)(i * 7919 % count) - count / 2;
  FUZZ_CHECK(sizeof message == ob_sparse_bytes(count));
  FUZZ_CHECK(ob_sparse_compress(values, count, message));
  FILE *file = open_seed("sparse", "two-chunks");
  fwrite(choices, 1, sizeof choices, file);
  fwrite(message, 1, sizeof message, file);
  fclose(file);
}

/* --- Proposals of four ranks, which are equal */

static void write_proposals(void) {
  static const struct ob_term terms[] = {{"count", 4096}, {"dtype", 1}, {"chunk_size", 7}};
  const uint8_t choices[2] = {0xf1, 7};
  unsigned char slot[OB_AGREE_BYTES] = {0};
  struct onebit_comm comm = {.size = 1, .control_memory = slot};
  FUZZ_CHECK(ob_agree(&comm, ONEBIT_OK, terms, 3) == ONEBIT_OK);
  FILE *file = open_seed("proposals", "equal");
  fwrite(choices, 1, sizeof choices, file);
  for (int rank = 0; rank < 4; rank++)
    fwrite(slot, 1, sizeof slot, file);
  fclose(file);
}

/* --- Checkpoints */

struct rank {
  onebit_comm_t comm;
  int kind, steps;
  unsigned char *part;
  size_t bytes;
};

static void *save_part(void *context) {
  struct rank *rank = context;
  struct fuzz_object made;
  fuzz_object_create(&made, rank->kind, rank->comm);
  FUZZ_CHECK(fuzz_object_train(&made, (size_t)rank->steps) == ONEBIT_OK);
  rank->part = fuzz_object_save(&made, &rank->bytes);
  fuzz_object_destroy(&made);
  onebit_comm_destroy(rank->comm);
  return NULL;
}

/* Writes the checkpoint parts of one or two ranks after `steps` steps. */
static void write_parts(int kind, int ranks, int steps) {
  struct rank rank[2] = {{.kind = kind, .steps = steps}, {.kind = kind, .steps = steps}};
  onebit_comm_t comms[2];
  pthread_t thread[2];
  FUZZ_CHECK(onebit_comm_create_loopback(ranks, comms) == ONEBIT_OK);
  for (int k = 0; k < ranks; k++) {
    rank[k].comm = comms[k];
    FUZZ_CHECK(pthread_create(&thread[k], NULL, save_part, &rank[k]) == 0);
  }
  for (int k = 0; k < ranks; k++)
    pthread_join(thread[k], NULL);
  size_t first = ranks > 1 ? rank[0].bytes : 0;
  const uint8_t choices[4] = {(uint8_t)kind, 15, (uint8_t)first, (uint8_t)(first >> 8)};
  FILE *file = open_seed("parts", "kind-%d-%d-%d", kind, ranks, steps);
  fwrite(choices, 1, sizeof choices, file);
  for (int k = 0; k < ranks; k++) {
    fwrite(rank[k].part, 1, rank[k].bytes, file);
    free(rank[k].part);
  }
  fclose(file);
}

static void write_manifest(int ranks) {
  struct ob_manifest_part parts[] = {{81736, 0x9f07c2e85a1b3d64}, {81720, 0x0c3d5e6f708192a3}};
  struct ob_manifest manifest = {
      .kind = "adam", .steps = 1200, .generation = 17, .ranks = ranks, .parts = parts};
  char *text = ob_manifest_text(&manifest);
  FILE *file = open_seed("manifest", "ranks-%d", ranks);
  fprintf(file, "%c%s", '1', text);
  fclose(file);
  ob_release(text);
}

/* --- Costs */

static void write_costs(void) {
  static const char *const hosts[] = {"node1", "4th#host"};
  static const struct ob_tuning_origin origin = {"2026-11-21", "Some MPI 4.1", hosts, 2};
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  costs.hosts = 2;
  costs.ranks_per_host = 3;
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    ob_cost_add_point(&costs.measured.factor[k], 1024 * (double)(k + 1), 0.75 + (double)k);
  ob_cost_add_point(&costs.measured.chunk, 4194304, 131072);
  FILE *file = open_seed("tuning", "good");
  ob_tuning_write(file, &costs, &origin);
  fclose(file);
  file = open_seed("costs", "points");
  fprintf(file,
          "correction exchange bits 1024 0.750\ncorrection allreduce float32 2048 1.5 # more\n"
          "correction allgather bits 4096 20\nchunk 4194304 131072\nchunk 16777216 262144\n");
  fclose(file);
}

/* --- Texts that users write */

static void write_text(const char *fuzzer, const char *name, const char *text) {
  FILE *file = open_seed(fuzzer, "%s", name);
  fputs(text, file);
  fclose(file);
}

static void write_texts(void) {
  write_text("rules", "rules",
             "compress allreduce float bytes>=1M comm-size>=4    # the first that fits\n"
             "pass allreduce,all half,bfloat16 count!=1000\n"
             "compress reduce-scatter,allgather bytes<4G count=7;least 64K\nwarmup 20\n");
  write_text("config", "deepspeed",
             "{\"threads\": 2, \"timeout\": \"never\", \"explain\": true, \"bits\": null,\n"
             " \"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 4e-4,\n"
             "  \"betas\": [0.9, -0.5E+1], \"name\": \"\\u00e9\\n\"}}, \"none\": [[], {}]}\n");
}

int main(int count, char **arguments) {
  if (count != 2)
    return 2;
  root = arguments[1];
  for (int shape = 0; shape < 32; shape += 4)
    write_message(shape, 1);
  for (int of = 1; of < 4; of++)
    write_message(of << 5, 1u << of);
  write_sparse();
  write_proposals();
  for (int kind = 0; kind < FUZZ_OPTIMIZERS; kind++)
    write_parts(kind, 1 + kind % 2, kind < 3 ? 4 : 1);
  for (int kind = FUZZ_OPTIMIZERS; kind < FUZZ_KINDS; kind++)
    for (int steps = 4; steps <= 6; steps += 2)
      write_parts(kind, 1 + steps / 2 % 2, steps);
  for (int ranks = 1; ranks <= 2; ranks++)
    write_manifest(ranks);
  write_costs();
  write_texts();
  return 0;
}
