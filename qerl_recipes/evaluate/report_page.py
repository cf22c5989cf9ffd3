"""Holds the Jinja template of a report: plain HTML with its style sheet inside, which fetches nothing."""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>QeRL: {{ title }}</title>
<style>
  body { margin: 2.5rem auto; max-width: 60rem; padding: 0 1.25rem; color: #1f2933; background: #fff;
         font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
  h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
  h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #e4e7eb; padding-bottom: .25rem; }
  .quiet, .missing { color: #616e7c; }
  .missing { border-left: 3px solid #9fb3c8; padding: .2rem 0 .2rem .8rem; }
  code { background: #f3f5f7; padding: .1rem .3rem; border-radius: 3px; font-size: .9em; }
  table { border-collapse: collapse; margin: .5rem 0 1rem; }
  th, td { text-align: left; padding: .28rem 1.4rem .28rem 0; border-bottom: 1px solid #eef0f2; vertical-align: top; }
  th { font-weight: 600; }
  td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
  td.value { overflow-wrap: anywhere; font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .85em; }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(25rem, 100%), 1fr)); gap: 1rem 1.5rem; }
  svg { width: 100%; height: auto; }
  .wide { overflow-x: auto; }
  p, h1 { overflow-wrap: anywhere; }
  @media (max-width: 40rem) {
    body { margin: 1rem auto; padding: 0 .8rem; }
    th, td { padding-right: .7rem; }
    .settings td { display: block; }
    .settings td:first-child { border-bottom: 0; padding-bottom: 0; color: #616e7c; }
  }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="quiet">{{ below }}</p>

<h2>Accuracy</h2>
{% if rows %}
{% if is_of_another %}
<p class="missing">These figures are of another adapter than the one that lies here now. This judges that one:
<code>{{ how_to_evaluate }}</code></p>
{% endif %}
{% if of_training %}
<p class="missing">{{ of_training | join(", ") }}: what the adapter was trained on, whole or in part, and no unseen
problems.</p>
{% endif %}
{% for line in too_many_cut %}
<p class="missing">{{ line }}.</p>
{% endfor %}
{% if unlike_training %}
<p class="missing">These figures were not made as the run was trained:</p>
<div class="wide"><table>
<tr><th></th><th>judged with</th><th>trained with</th></tr>
{% for name, judged, trained in unlike_training %}
<tr><td>{{ name }}</td><td class="value">{{ judged }}</td><td class="value">{{ trained }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
<p class="quiet">From <code>{{ source[0] }}</code>{% if source[1:] %}, the newest here; older:
<code>{{ source[1:] | join(", ") }}</code>{% endif %}.</p>
{{ accuracy_plot }}
<div class="wide"><table>
<tr>{% if several_tasks %}<th>task</th>{% endif %}<th>model</th><th class="number">accuracy</th>
<th class="number">95 % interval</th><th class="number">problems</th><th class="number">ended</th></tr>
{% for row in rows %}
<tr>{% if several_tasks %}<td>{{ row.task }}</td>{% endif %}<td>{{ row.label }}</td>
<td class="number">{{ "%.1f" | format(100 * row.accuracy) }} %</td>
<td class="number">{{ "%.1f" | format(100 * row.low) }} to {{ "%.1f" | format(100 * row.high) }} %</td>
<td class="number">{{ row.n }}</td>
<td class="number">{% if row.ended is not none %}{{ "%.0f" | format(100 * row.ended) }} %{% endif %}</td></tr>
{% endfor %}
</table></div>
{% else %}
<p class="missing">Not evaluated yet: there is no <code>evaluation.json</code>. This writes it:
<code>{{ how_to_evaluate }}</code></p>
{% endif %}

<h2>Training</h2>
{% if pictures %}
<p class="quiet">A thin light line has the value of each step,
the dark line over it the mean of {{ smoothing }} steps.</p>
<div class="plots">
{% for picture in pictures %}
<div>{{ picture }}</div>
{% endfor %}
</div>
{% if clipped %}
<p class="missing">{{ clipped }}</p>
{% endif %}
<div class="wide"><table>
<tr><th></th><th class="number">first {{ edge }} steps</th><th class="number">last {{ edge }} steps</th></tr>
{% for name, first, last in first_and_last %}
<tr><td>{{ name }}</td><td class="number">{{ first }}</td><td class="number">{{ last }}</td></tr>
{% endfor %}
</table></div>
{% else %}
<p class="missing">Nothing trained here: there are no steps in <code>metrics.jsonl</code>. This writes them:
<code>{{ how_to_train }}</code></p>
{% endif %}

{% if settings %}
<h2>Settings and versions</h2>
<table class="settings">
{% for name, value in settings %}
<tr><td>{{ name }}</td><td class="value">{{ value }}</td></tr>
{% endfor %}
</table>
{% endif %}
</body>
</html>
"""
