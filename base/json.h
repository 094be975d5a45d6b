/* Numbers as JSON has them. */
#ifndef OB_BASE_JSON_H
#define OB_BASE_JSON_H

/* Bytes of the longest number, with its terminating zero. */
enum { OB_JSON_NUMBER = 32 };

/* Writes 9 significant digits of the value into `text`, with a point whatever decimal point the
 * program's locale has; "null" for a value that is not finite. Returns `text`. */
const char *ob_json_number(char text[OB_JSON_NUMBER], double value);

/* Puts a point in place of a locale's decimal point, of one or several bytes, which is all there
 * can be in a number besides digits, signs and an e. */
void ob_json_set_point(char *number);

#endif
