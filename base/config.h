/*
 * The file that ONEBIT_CONFIG names: JSON, read once a process, when the first communicator is
 * made or a variable is looked up. Its outermost keys are the environment variables in lower case
 * and without ONEBIT_, and DeepSpeed's, so that a configuration of DeepSpeed's can be that file.
 */
#ifndef OB_BASE_CONFIG_H
#define OB_BASE_CONFIG_H

#include "base/json_read.h"
#include "base/knobs.h"

/* Whether there is none, or it is well: ONEBIT_ERROR_FILE, it cannot be read; or
 * ONEBIT_ERROR_ARGUMENT, and the message names file, line and key. A file that is wrong has no
 * values. */
onebit_status_t ob_config_check(void);

/* The value of a knob in the file, as the environment would have it; NULL: there is none. */
const char *ob_config_knob(enum ob_knob knob, const struct ob_json_value **value);

/* A value of the object, or of the outermost one, NULL; NULL: there is none. */
const struct ob_json_value *ob_config_find(const struct ob_json_value *object, const char *key);

/* The value that follows in the text, of which find's is the first in an object; NULL: none. */
const struct ob_json_value *ob_config_next(const struct ob_json_value *object,
                                           const struct ob_json_value *value);

/* ONEBIT_ERROR_ARGUMENT: "FILE:LINE: KEY is VALUE, " and what is wrong with it. */
onebit_status_t ob_config_wrong(const struct ob_json_value *value, const char *why);

/* "FILE:LINE: KEY" and "FILE:LINE", in the thread's memory, which is the next one's too. */
const char *ob_config_origin(const struct ob_json_value *value);
const char *ob_config_line(const struct ob_json_value *value);

/* Whether it is a key of DeepSpeed's that has no effect: why, or "". NULL: it is not known. */
const char *ob_config_without_effect(const char *key, bool of_optimizer);

/* Warns of the outermost keys without effect, once a process. */
void ob_config_warn(int rank);

#endif
