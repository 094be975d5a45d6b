/* Writing a tuning file. */
#include <string.h>

#include "collectives/cost/tuning.h"
#include "collectives/cost/tuning_keys.h"
#include "collectives/cost/tuning_points.h"

/* With a point, whatever the locale puts there, which may be several bytes: 1<point>234567e-05. */
static void print_number(FILE *file, const char *name, double value, const char *meaning) {
  char text[64];
  snprintf(text, sizeof text, "%.8e", value);
  const char *exponent = strchr(text, 'e');
  fprintf(file, "%s %c.%.8se%s # %s\n", name, text[0], exponent - 8, exponent + 1, meaning);
}

bool ob_tuning_write(FILE *file, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin) {
  fprintf(file, "onebit tuning %d\n", OB_TUNING_VERSION);
  fprintf(file, "# Written by onebit-tune; ONEBIT_TUNING names another file, or none.\n");
  fprintf(file, "date %s\nmpi %s\ncodec %s\n", origin->date, origin->mpi, costs->codec);
  for (size_t k = 0; k < origin->host_count; k++)
    fprintf(file, "host %s\n", origin->hosts[k]);
  for (size_t k = 0; k < OB_TUNING_KEYS; k++) {
    double value;
    memcpy(&value, (const char *)costs + ob_tuning_keys[k].offset, sizeof value);
    print_number(file, ob_tuning_keys[k].name, value, ob_tuning_keys[k].meaning);
  }
  ob_tuning_write_points(file, &costs->measured);
  return fflush(file) == 0 && !ferror(file);
}
