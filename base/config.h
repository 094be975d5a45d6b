/*
 * The file that ONEBIT_CONFIG names: JSON, read once a process, when the first communicator is
 * made or a variable is looked up. Its outermost keys are the environment variables in lower case
 * and without ONEBIT_, and DeepSpeed's, so that a configuration of DeepSpeed's can be that file.
 */
#ifndef OB_BASE_CONFIG_H
#define OB_BASE_CONFIG_H

#include "base/json_read.h"
#include "base/knobs.h"

/* Checks the file: ONEBIT_OK if it is correct or there is none, ONEBIT_ERROR_FILE if it cannot be
 * read, ONEBIT_ERROR_ARGUMENT with a message that names file, line and key if it is wrong. A wrong
 * file has no values. */
onebit_status_t ob_config_check(void);

/* The value of a knob in the file, as the environment would have it; NULL: there is none. */
const char *ob_config_knob(enum ob_knob knob, const struct ob_json_value **value);

/* The first value with this key in the object, or in the outermost one (NULL); NULL: there is
 * none. */
const struct ob_json_value *ob_config_find(const struct ob_json_value *object, const char *key);

/* The value of the object that follows `value` in the text, the first one after NULL; NULL:
 * none. */
const struct ob_json_value *ob_config_next(const struct ob_json_value *object,
                                           const struct ob_json_value *value);

/* Fails with ONEBIT_ERROR_ARGUMENT: "FILE:LINE: KEY is VALUE, " and what is wrong with it. */
onebit_status_t ob_config_wrong(const struct ob_json_value *value, const char *why);

/* "FILE:LINE: KEY" and "FILE:LINE". Both are in the thread's memory, which the next call
 * overwrites. */
const char *ob_config_origin(const struct ob_json_value *value);
const char *ob_config_line(const struct ob_json_value *value);

/* The reason why a key of DeepSpeed's has no effect here, or "" where none is recorded; NULL: the
 * key is not known as such. */
const char *ob_config_without_effect(const char *key, bool of_optimizer);

/* Warns of the outermost keys without effect, once a process. */
void ob_config_warn(int rank);

#endif
