{{/* The name of everything: that of the release, with the chart's if it lacks that. With room for -peers and -100. */}}
{{- define "sow.name" -}}
{{- $name := ternary .Release.Name (printf "%s-sow" .Release.Name) (contains "sow" .Release.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "sow.labels" -}}
app.kubernetes.io/name: {{ include "sow.name" . }}
{{- end -}}

{{- define "sow.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}
