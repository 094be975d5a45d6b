/*
 * Reads an optimizer's options in the file of ONEBIT_CONFIG: its section `optimizer`, with the type
 * and the names of DeepSpeed's or of this library's, and gradient_clipping. It counts where the
 * program leaves an option zero.
 */
#ifndef OB_OPTIMIZERS_CONFIG_H
#define OB_OPTIMIZERS_CONFIG_H

#include "base/knobs.h"
#include "optimizers/method.h"

struct ob_option_file {
  const struct ob_json_value *type, *params; /* NULL: it says nothing */
  const char *method;                        /* the type's; NULL: there is no section */
  bool deepspeeds;                           /* the type is one of DeepSpeed's */
  bool deepspeed_profile;                    /* the optimizer has its profile */
};

/* Reads the section, which is of one type of optimizer, and checks that type.
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE. */
onebit_status_t ob_option_file_open(struct ob_option_file *file);

/* The same for an optimizer of this method, with its keys checked. Of a section of another type
 * nothing is left. */
onebit_status_t ob_option_file_for(const struct ob_method *method, struct ob_option_file *file);

/* The value of an option; NULL: there is none. */
const struct ob_json_value *ob_option_in_file(const struct ob_option_file *file,
                                              const struct ob_option *row);

/* The value as a number, and whether it is one of that kind. */
onebit_status_t ob_option_number(const struct ob_option_file *file, const struct ob_option *row,
                                 const struct ob_json_value *value, double *number);

/* Warns of what is without effect for an optimizer of this method, once a process. */
void ob_option_file_warn(const struct ob_method *method, int rank);

#endif
