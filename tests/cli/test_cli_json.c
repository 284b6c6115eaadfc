/* test_cli_json.c: the program's JSON: what is written is JSON, strings survive, what is no JSON is refused. */
#include "test.h"

#include "base/json.h"
#include "base/json_read.h"

#include <math.h>
#include <stdlib.h>

/* The writer belongs to the program, which the tests do not link. */
#include "base/json.c"

static char text[4096];

static void start(json *j)
{
    *j = (json){.out = tmpfile()};
    text[0] = '\0';
}

static const char *finish(json *j)
{
    rewind(j->out);
    size_t n = fread(text, 1, sizeof text - 1, j->out);
    text[n] = '\0';
    fclose(j->out);
    return text;
}

TEST(cli_json, nesting)
{
    json j;
    start(&j);
    REQUIRE_TEST(j.out != NULL);
    json_object(&j, NULL);
    json_string(&j, "a", "b");
    json_array(&j, "list");
    json_integer(&j, NULL, -3);
    json_bool(&j, NULL, true);
    json_object(&j, NULL);
    json_close(&j);
    json_close(&j);
    json_array(&j, "empty");
    json_close(&j);
    json_number(&j, "x", 0.5);
    json_close(&j);
    const char *want = "{\n  \"a\": \"b\",\n  \"list\": [\n    -3,\n    true,\n    {}\n  ],\n"
                       "  \"empty\": [],\n  \"x\": 0.5\n}\n";
    CHECK_MSG(strcmp(finish(&j), want) == 0, "%s", text);
}

TEST(cli_json, strings)
{
    json j;
    start(&j);
    REQUIRE_TEST(j.out != NULL);
    json_string(&j, NULL, "q\" b\\ n\n t\t \x01 \xc3\xa9");
    CHECK_MSG(strcmp(finish(&j), "\"q\\\" b\\\\ n\\n t\\t \\u0001 \xc3\xa9\"") == 0, "%s", text);
}

TEST(cli_json, numbers)
{
    static const double values[] = {0, -1.5, 1e300, 2.5e-7, 123456789};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        json j;
        start(&j);
        REQUIRE_TEST(j.out != NULL);
        json_number(&j, NULL, values[i]);
        CHECK_MSG(strtod(finish(&j), NULL) == values[i], "%s", text);
    }
    static const double none[] = {(double)INFINITY, -(double)INFINITY, (double)NAN};
    for (size_t i = 0; i < 3; i++) {
        json j;
        start(&j);
        REQUIRE_TEST(j.out != NULL);
        json_number(&j, NULL, none[i]);
        CHECK_MSG(strcmp(finish(&j), "null") == 0, "%s", text);
    }
}

/* ---- Reading */

TEST(cli_json, what_is_written_is_read)
{
    json j;
    json_error error;
    start(&j);
    REQUIRE_TEST(j.out != NULL);
    json_object(&j, NULL);
    json_string(&j, "text", "q\" b\\ n\n t\t \x01 \xc3\xa9");
    json_array(&j, "list");
    json_number(&j, NULL, -0.125);
    json_bool(&j, NULL, true);
    json_number(&j, NULL, (double)NAN);
    json_close(&j);
    json_close(&j);
    json_value *v = json_read(finish(&j), 1, &error);
    REQUIRE_TEST(v != NULL);
    CHECK(strcmp(json_text(v, "text"), "q\" b\\ n\n t\t \x01 \xc3\xa9") == 0);
    const json_value *list = json_member(v, "list");
    REQUIRE_TEST(list && list->kind == JSON_ARRAY && list->first && list->first->next);
    CHECK(list->first->number == -0.125 && list->first->line == 4 && list->first->column == 5);
    CHECK(list->first->next->kind == JSON_BOOL && list->first->next->number == 1);
    CHECK(list->first->next->next->kind == JSON_NULL && list->first->next->next->next == NULL);
    CHECK(strcmp(json_text(v, "list"), "") == 0 && isnan(json_real(v, "text")));
    CHECK(json_member(v, "none") == NULL && json_member(NULL, "none") == NULL);
    json_free(v);
}

TEST(cli_json, escapes_are_resolved)
{
    json_error error;
    json_value *v =
        json_read("\"\\u0041\\/\\u00e9\\u20ac\\ud83d\\ude00\\ud83d\\u0041\"", 1, &error);
    REQUIRE_TEST(v != NULL);
    CHECK_MSG(strcmp(v->text, "A/\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbd"
                              "A") == 0,
              "%s", v->text);
    json_free(v);
}

TEST(cli_json, what_is_no_json_is_refused_with_its_place)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "line 1, column 1: a value expected, the text ends"},
        {"{\n \"a\": 1,}", "line 2, column 9: a name in quotes expected, not '}'"},
        {"[1, 2", "line 1, column 6: ',' or ']' expected, the text ends"},
        {"[1 2]", "line 1, column 4: ',' or ']' expected, not '2'"},
        {"[-]", "line 1, column 2: a value expected, not '-'"},
        {"[1.]", "line 1, column 2: a value expected, not '1'"},
        {"tru", "line 1, column 1: a value expected, not 't'"},
        {"nulll", "line 1, column 5: the end of the text expected, not 'l'"},
        {"\"a", "line 1, column 3: the end of a string, '\"', expected, the text ends"},
        {"\"\\x\"", "line 1, column 3: one of \"\\/bfnrt or u and four digits expected, not 'x'"},
        {"\"\\u12g4\"",
         "line 1, column 3: one of \"\\/bfnrt or u and four digits expected, not 'u'"},
        {"\"\\",
         "line 1, column 3: one of \"\\/bfnrt or u and four digits expected, the text ends"},
        {"\xff", "line 1, column 1: a value expected, not byte 255"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_error error = {.text = ""};
        CHECK(json_read(cases[i].text, 1, &error) == NULL);
        CHECK_MSG(strcmp(error.text, cases[i].error) == 0, "%s: %s", cases[i].text, error.text);
    }
}

TEST(cli_json, depth_is_limited)
{
    char deep[1000];
    json_error error = {.text = ""};
    memset(deep, '[', sizeof deep);
    deep[sizeof deep - 1] = '\0';
    CHECK(json_read(deep, 1, &error) == NULL);
    CHECK_MSG(strcmp(error.text, "line 1, column 66: nested too deeply") == 0, "%s", error.text);
}
