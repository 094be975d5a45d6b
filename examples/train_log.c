/* The log of train_log.h. */
#define _POSIX_C_SOURCE 200809L
#include "examples/train_log.h"

#include <inttypes.h>
#include <math.h>
#include <unistd.h>

/* Reads the lines of the steps that were made, and cuts off what comes after them. */
static int read_made_lines(train_log_t *log, size_t made) {
  char text[512];
  long end = 0;
  while (fgets(text, sizeof text, log->file)) {
    size_t step;
    double seconds;
    uint64_t bytes;
    if (sscanf(text, "{\"step\":%zu,\"seconds\":%lf,\"bytes\":%" SCNu64, &step, &seconds, &bytes) !=
            3 ||
        step > made)
      break;
    log->seconds = seconds;
    log->bytes = bytes;
    end = ftell(log->file);
  }
  return fseek(log->file, end, SEEK_SET) == 0 && ftruncate(fileno(log->file), end) == 0 ? 0 : -1;
}

int train_log_open(train_log_t *log, const char *path, size_t made) {
  *log = (train_log_t){.file = made > 0 ? fopen(path, "r+") : NULL};
  if (log->file && read_made_lines(log, made) == 0)
    return 0;
  train_log_close(log);
  log->file = fopen(path, "w");
  return log->file ? 0 : -1;
}

void train_log_add(train_log_t *log, const train_log_line_t *line) {
  if (!log->file)
    return;
  fprintf(log->file, "{\"step\":%zu,\"seconds\":%.6f,\"bytes\":%" PRIu64, line->step,
          log->seconds + line->seconds, log->bytes + line->bytes);
  print_json_number(log->file, "training_loss", line->training_loss);
  if (line->loss)
    print_json_number(log->file, "loss", *line->loss);
  fprintf(log->file, "}\n");
  fflush(log->file);
}

void train_log_close(train_log_t *log) {
  if (log->file)
    fclose(log->file);
  log->file = NULL;
}

void print_json_number(FILE *file, const char *name, double number) {
  if (isfinite(number))
    fprintf(file, ",\"%s\":%.6g", name, number);
  else
    fprintf(file, ",\"%s\":null", name);
}
